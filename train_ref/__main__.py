"""`python -m train_ref` runs the demo."""

from train_ref.demo import main

main()
