#![no_main]

use eldr_core_fuzz::signature_raw;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| signature_raw::check(input));
