#![no_main]

use eldr_core_fuzz::signature_structured;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: signature_structured::Input| signature_structured::check(input));
