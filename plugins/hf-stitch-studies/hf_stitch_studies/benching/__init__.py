"""The bench of similarities: does a distance of representations predict how much they differ in function?"""
