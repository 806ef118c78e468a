//! Expert-locality routing: signatures, centroid blobs, decisions and the decode step model. Pure: no I/O, no clock.
