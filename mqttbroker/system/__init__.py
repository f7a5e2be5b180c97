"""The process and the system below it: memory, open files, the service manager, work that nobody awaits."""
