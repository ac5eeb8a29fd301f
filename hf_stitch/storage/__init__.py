"""Files that a killed process leaves whole."""
