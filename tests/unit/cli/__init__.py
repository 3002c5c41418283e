"""The command line, as users meet it: real processes, their output and their exit statuses."""
