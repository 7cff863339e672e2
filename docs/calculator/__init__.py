"""memlab in the reader's browser: a plain page, its script, and the build step that puts them together."""
