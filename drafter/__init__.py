"""The drafter: model, layout of packs, checkpoints in z-lab's form, drafts and the walk that counts them."""
