"""From a model and data to statistics: session, problem, strategy, sweep."""
