"""`python -m train_ref.demo`: how fast the library is, that it trains as plain PyTorch does, and how a
training collapses, is warned of, and is put right. The images are those that scikit-learn carries: nothing is
downloaded."""
