"""What programs of several rooms share: the machine's description, the files of results."""
