"""Pictures of results: plots and galleries of ranked images. Matplotlib is loaded when one is drawn, not
before."""
