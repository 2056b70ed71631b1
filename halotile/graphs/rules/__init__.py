"""Rules for the values of a job, each with the words of its error. No image is looked at here."""
