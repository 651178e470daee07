"""The commands `audit`, `bench` and `reproduce`: the command line loads each when it is called."""
