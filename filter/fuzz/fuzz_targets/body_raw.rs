#![no_main]

use eldr_filter_fuzz::body_raw;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| body_raw::check(input));
