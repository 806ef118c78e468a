#![no_main]

use eldr_core_fuzz::blob_structured;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: blob_structured::Input| blob_structured::check(input));
