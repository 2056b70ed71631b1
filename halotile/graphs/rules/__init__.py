"""Rules for the values of a job, each with its error message. No image is opened here."""
