"""Other libraries, each with its default options and with its best; imported only when they are timed.

"Default" sets only what the task needs: the number of steps, clipping to norm 1, the precision, no checkpoints. "Best"
also sets the options that make it faster: compilation, the fused optimizer, no logging.
"""
