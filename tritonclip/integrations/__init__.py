"""Trainers of other packages; importing one of these modules imports the package that it serves."""
