#![no_main]

use eldr_filter_fuzz::body_structured;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: body_structured::Input| body_structured::check(input));
