"""What is on disk: DeepSpeed's folders, files and dictionaries, read without DeepSpeed."""
