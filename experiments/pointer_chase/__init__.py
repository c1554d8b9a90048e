"""Does each loop solve one more hop, in one model trained over mixed depths?"""
