"""Files and folders that stay complete if the writing process is killed."""
