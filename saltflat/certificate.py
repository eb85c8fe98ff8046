"""Whether the Gauss-Newton matrix of a layer is its Hessian: measured, not guessed."""
