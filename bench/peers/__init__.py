"""Other libraries, each at its default and at its best; imported only when they race, and reported when missing.

Default is what the library does when it is asked for no more than the task needs: the step limit, clipping to norm 1,
the precision, no checkpoints. Best is with its options turned for speed: compiled, fused, and silent.
"""
