"""The command `gradwire`, with its subcommands run, doctor, serve and schedule."""
