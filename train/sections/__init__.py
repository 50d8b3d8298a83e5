"""The sections of a config, one file for each concern; `train.config` puts them together."""
