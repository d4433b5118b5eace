"""A package vllm that is there and does nothing, for roots whose engines are tiny roles."""
