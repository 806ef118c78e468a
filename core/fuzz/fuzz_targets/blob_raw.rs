#![no_main]

use eldr_core_fuzz::blob_raw;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| blob_raw::check(input));
