"""The command line: each verb parses, calls one library function, and prints."""
