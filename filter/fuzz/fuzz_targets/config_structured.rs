#![no_main]

use eldr_filter_fuzz::config_structured;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: config_structured::Input| config_structured::check(input));
