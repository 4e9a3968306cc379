"""Types, plan, state, statistics, configuration and errors. Imports nothing from above itself."""
