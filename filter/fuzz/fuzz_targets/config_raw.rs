#![no_main]

use eldr_filter_fuzz::config_raw;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| config_raw::check(input));
