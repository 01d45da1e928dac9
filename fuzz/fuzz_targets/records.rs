#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| xkv_store::fuzzing::records(bytes));
