"""Files that the MP4 tests share: a serial writer, and an own reader of the boxes."""
