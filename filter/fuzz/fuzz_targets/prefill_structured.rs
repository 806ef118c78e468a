#![no_main]

use eldr_filter_fuzz::prefill_structured;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: prefill_structured::Input| prefill_structured::check(input));
