"""The commands behind `mtx2vllm`, and how they show things. Only click is imported at the top."""
