#![no_main]

use eldr_filter_fuzz::prefill_raw;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| prefill_raw::check(input));
