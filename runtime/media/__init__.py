"""Reference media: images, videos and sounds of a request, from whole files to pixels and samples.

`probe` says what a file holds without decoding a picture; `limits` is the one table of what is legal; `source` fetches
files; `pixels`, `frames` and `sound` decode. A file is told by its content, never by its name. Every refusal is a
RequestError that names the field.

The libraries that decode (FFmpeg through PyAV, Pillow, libheif) run in the calling process and are bounded by
construction: our own readers (`boxes`, `movie`, `stills`, `riff`) check structure, sizes and counts of a file before a
library sees it, libraries are told one format and how many pixels a frame may have, and every loop counts.
"""
