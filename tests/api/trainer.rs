// The trainer of samples/01-first-trainer in Rust over extern "C", with ranks as threads. Prints the digest of each
// stage. Build: rustc -O trainer.rs -L DIRECTORY -l forebay-c
use std::ffi::{c_char, c_void, CStr, CString};
use std::ptr::null_mut;

const RANKS: usize = 3;
const STEPS: usize = 200;
const INPUTS: usize = 8;
const HIDDEN: usize = 32;
const BATCH: usize = 16;

type Handle = *mut c_void; // Every handle is a pointer to an incomplete type.

#[link(name = "forebay-c")]
extern "C" {
    fn forebay_last_error() -> *const c_char;
    fn forebay_options_create(options: *mut Handle) -> i32;
    fn forebay_options_set(options: Handle, name: *const c_char, value: *const c_char) -> i32;
    fn forebay_options_destroy(options: Handle);
    fn forebay_device_open(name: *const c_char, options: Handle, device: *mut Handle) -> i32;
    fn forebay_device_close(device: Handle);
    fn forebay_stream_synchronize(device: Handle, stream: *mut c_void) -> i32;
    fn forebay_local_group_create(size: i32, options: Handle, group: *mut Handle) -> i32;
    fn forebay_local_group_communicator(group: Handle, rank: i32, device: Handle, ranks: *mut Handle) -> i32;
    fn forebay_local_group_destroy(group: Handle);
    fn forebay_communicator_destroy(ranks: Handle);
    fn forebay_engine_create(device: Handle, ranks: Handle, grid: Handle, timeline: Handle, options: Handle,
                             engine: *mut Handle) -> i32;
    fn forebay_engine_add_unit(engine: Handle, name: *const c_char, flags: i32, unit: *mut i32) -> i32;
    fn forebay_engine_add_parameter(engine: Handle, unit: i32, name: *const c_char, count: u64, group: i32,
                                    flags: i32, index: *mut i32) -> i32;
    fn forebay_engine_commit(engine: Handle) -> i32;
    fn forebay_engine_set(engine: Handle, unit: i32, index: i32, dtype: i32, values: *const c_void, first: u64,
                          count: u64) -> i32;
    fn forebay_engine_digest(engine: Handle, digest: *mut c_char) -> i32;
    fn forebay_engine_destroy(engine: Handle);
    fn forebay_hyperparameter(engine: Handle, group: i32, name: *const c_char, value: f64) -> i32;
    fn forebay_step_begin(engine: Handle) -> i32;
    fn forebay_micro_step_begin(engine: Handle, index: i32) -> i32;
    fn forebay_acquire(engine: Handle, unit: i32, backward: i32, stream: *mut c_void) -> i32;
    fn forebay_parameter(engine: Handle, unit: i32, index: i32, address: *mut *mut c_void) -> i32;
    fn forebay_gradient(engine: Handle, unit: i32, index: i32, address: *mut *mut c_void,
                        accumulate: *mut i32) -> i32;
    fn forebay_release(engine: Handle, unit: i32, stream: *mut c_void) -> i32;
    fn forebay_step(engine: Handle, result: *mut c_void, bytes: u64) -> i32;
    fn sinf(x: f32) -> f32;
    fn tanhf(x: f32) -> f32;
}

fn check(code: i32) {
    if code != 0 {
        panic!("{}", unsafe { CStr::from_ptr(forebay_last_error()) }.to_string_lossy());
    }
}

fn text(value: &str) -> CString {
    CString::new(value).unwrap()
}

unsafe fn train(rank: usize, stage: usize, group: usize) {
    let mut options = null_mut();
    let mut device = null_mut();
    let mut ranks = null_mut();
    let mut engine = null_mut();
    check(forebay_options_create(&mut options));
    check(forebay_options_set(options, text("stage").as_ptr(), text(&stage.to_string()).as_ptr()));
    check(forebay_device_open(text("host").as_ptr(), options, &mut device));
    check(forebay_local_group_communicator(group as Handle, rank as i32, device, &mut ranks));
    check(forebay_engine_create(device, ranks, null_mut(), null_mut(), options, &mut engine));
    let (mut first, mut second, mut w1, mut w2) = (0, 0, 0, 0);
    check(forebay_engine_add_unit(engine, text("first").as_ptr(), 1, &mut first));
    check(forebay_engine_add_unit(engine, text("second").as_ptr(), 0, &mut second));
    check(forebay_engine_add_parameter(engine, first, text("w1").as_ptr(), (HIDDEN * INPUTS) as u64, 0, 0, &mut w1));
    check(forebay_engine_add_parameter(engine, second, text("w2").as_ptr(), HIDDEN as u64, 0, 0, &mut w2));
    check(forebay_engine_commit(engine));
    let values: Vec<f32> = (0..HIDDEN * INPUTS).map(|i| 0.3f32 * sinf(7.0 * i as f32)).collect();
    let start = values.as_ptr() as *const c_void;
    check(forebay_engine_set(engine, first, w1, 0, start, 0, values.len() as u64));
    check(forebay_engine_set(engine, second, w2, 0, start, 0, HIDDEN as u64));
    check(forebay_hyperparameter(engine, 0, text("lr").as_ptr(), 0.02));
    check(forebay_hyperparameter(engine, -1, text("clip").as_ptr(), 1.0));

    let acquire = |unit: i32, backward: i32| {
        check(forebay_acquire(engine, unit, backward, null_mut()));
        check(forebay_stream_synchronize(device, null_mut()));
    };
    let parameter = |unit: i32, count: usize| {
        let mut address = null_mut();
        check(forebay_parameter(engine, unit, 0, &mut address));
        std::slice::from_raw_parts(address as *const f32, count)
    };
    let gradient = |unit: i32, count: usize| {
        let (mut address, mut accumulate) = (null_mut(), 0);
        check(forebay_gradient(engine, unit, 0, &mut address, &mut accumulate));
        std::slice::from_raw_parts_mut(address as *mut f32, count)
    };
    for step in 0..STEPS {
        check(forebay_step_begin(engine));
        check(forebay_micro_step_begin(engine, 0));
        let (mut x, mut y) = ([[0f32; INPUTS]; BATCH], [0f32; BATCH]);
        let (mut hidden, mut error) = ([[0f32; HIDDEN]; BATCH], [0f32; BATCH]);
        let mut hidden_gradient = [[0f32; HIDDEN]; BATCH];
        acquire(first, 0);
        let w = parameter(first, HIDDEN * INPUTS);
        for b in 0..BATCH {
            for i in 0..INPUTS {
                x[b][i] = sinf((((step * RANKS + rank) * BATCH + b) * INPUTS + i) as f32);
                y[b] += x[b][i] * (i as f32 - 3.0) / 4.0;
            }
            for h in 0..HIDDEN {
                let mut sum = 0f32;
                for i in 0..INPUTS {
                    sum += w[h * INPUTS + i] * x[b][i];
                }
                hidden[b][h] = tanhf(sum);
            }
        }
        check(forebay_release(engine, first, null_mut()));
        acquire(second, 0);
        let w = parameter(second, HIDDEN);
        for b in 0..BATCH {
            let mut sum = 0f32;
            for h in 0..HIDDEN {
                sum += w[h] * hidden[b][h];
            }
            error[b] = sum - y[b];
        }
        check(forebay_release(engine, second, null_mut()));
        acquire(second, 1);
        let (w, g) = (parameter(second, HIDDEN), gradient(second, HIDDEN));
        for h in 0..HIDDEN {
            g[h] = 0.0;
            for b in 0..BATCH {
                let slope = 2.0 * error[b] / BATCH as f32;
                g[h] += slope * hidden[b][h];
                hidden_gradient[b][h] = slope * w[h] * (1.0 - hidden[b][h] * hidden[b][h]);
            }
        }
        check(forebay_release(engine, second, null_mut()));
        acquire(first, 1);
        let g = gradient(first, HIDDEN * INPUTS);
        for h in 0..HIDDEN {
            for i in 0..INPUTS {
                let mut sum = 0f32;
                for b in 0..BATCH {
                    sum += hidden_gradient[b][h] * x[b][i];
                }
                g[h * INPUTS + i] = sum;
            }
        }
        check(forebay_release(engine, first, null_mut()));
        let mut result = [0u64; 8];
        check(forebay_step(engine, result.as_mut_ptr() as *mut c_void, 64));
    }
    let mut digest = [0 as c_char; 33];
    check(forebay_engine_digest(engine, digest.as_mut_ptr()));
    if rank == 0 {
        println!("stage {}: digest {}", stage, CStr::from_ptr(digest.as_ptr()).to_string_lossy());
    }
    forebay_options_destroy(options);
    forebay_device_close(device);
    forebay_communicator_destroy(ranks);
    forebay_engine_destroy(engine);
}

fn main() {
    for stage in [0, 3] {
        let mut group = null_mut();
        check(unsafe { forebay_local_group_create(RANKS as i32, null_mut(), &mut group) });
        let shared = group as usize; // Any thread may use a handle.
        let ranks: Vec<_> =
            (0..RANKS).map(|rank| std::thread::spawn(move || unsafe { train(rank, stage, shared) })).collect();
        for rank in ranks {
            rank.join().unwrap();
        }
        unsafe { forebay_local_group_destroy(group) };
    }
}
