"""The subcommands of `gradwire` that predict and measure: advise, bench, simulate, trace, tune."""
