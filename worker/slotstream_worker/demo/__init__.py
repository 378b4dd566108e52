"""The demo: a small spiking network that tells nine speakers apart, frame by frame."""
