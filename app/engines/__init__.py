"""The seam to the engines: what a lane is, and the two kinds of lane (vLLM's and the scripted one).

``import app.engines`` needs no torch; vLLM is imported when a vLLM lane starts.
"""
