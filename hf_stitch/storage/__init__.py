"""Files and folders that stay complete if a process is killed while it writes."""
