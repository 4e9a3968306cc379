"""Types, plan, state store, statistics, configuration and errors. Imports nothing above itself."""
