"""What a training needs beside its method: batches and checkpoints."""
