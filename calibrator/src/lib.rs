//! The eldr command: fits centroid blobs from traces and inspects them.
