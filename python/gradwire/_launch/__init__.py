"""Starting and ending of ranks' processes, and the root cause among their failures."""
