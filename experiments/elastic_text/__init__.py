"""What does one checkpoint for every loop count cost on text, and which recipe costs least?"""
