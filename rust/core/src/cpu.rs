//! Hot loops compiled twice: for any CPU of the target, and for one with AVX2 and FMA, chosen at run time.
//!
//! `unsafe` is calling what was compiled for a CPU that was found, and moving a line between memory and a register. The
//! bodies themselves are safe code.

/// `wide! { fn name(arguments) -> Result = body; }` defines `name`, which runs `body::<true>` compiled for AVX2 and FMA
/// where the CPU has both, else `body::<false>`. `body` must be `#[inline(always)]`, or it is not compiled anew.
macro_rules! wide {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident;) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,bmi1,bmi2,fma,lzcnt,popcnt")]
                fn wide($($arg: $ty),*) $(-> $ret)? {
                    $body::<true>($($arg),*)
                }
                #[target_feature(enable = "avx2,bmi1,bmi2,fma,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl")]
                fn wider($($arg: $ty),*) $(-> $ret)? {
                    $body::<true>($($arg),*)
                }
                // SAFETY: both are safe code; all they need is a CPU with their features, which was just found out.
                #[allow(unsafe_code)]
                match $crate::cpu::width() {
                    $crate::cpu::Width::Avx512 => return unsafe { wider($($arg),*) },
                    $crate::cpu::Width::Avx2 => return unsafe { wide($($arg),*) },
                    $crate::cpu::Width::Base => {}
                }
            }
            $body::<false>($($arg),*)
        }
    };
}
pub(crate) use wide;

/// What `wide!` compiles for.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    Base,
    Avx2,
    Avx512,
}

/// The widest of them that this CPU can run; `scripts/cpus.sh` has the tests run as on lesser ones.
#[cfg(target_arch = "x86_64")]
pub(crate) fn width() -> Width {
    use std::arch::is_x86_feature_detected as has;
    if cfg!(sao_cpu = "base") {
        return Width::Base;
    }
    let two = has!("avx2")
        && has!("bmi1")
        && has!("bmi2")
        && has!("fma")
        && has!("lzcnt")
        && has!("popcnt");
    let four = cfg!(not(sao_cpu = "avx2"))
        && has!("avx512f")
        && has!("avx512bw")
        && has!("avx512dq")
        && has!("avx512vl");
    match (two, four) {
        (true, true) => Width::Avx512,
        (true, false) => Width::Avx2,
        _ => Width::Base,
    }
}

/// `folding! { fn name(arguments) -> Option<Result> = body; }` defines `name`, which is `None` unless the CPU multiplies
/// polynomials in 512-bit registers; `body` is compiled for that (`#[target_feature]` as here).
macro_rules! folding {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) -> $ret:ty = $body:ident;) => {
        $(#[$meta])*
        $vis fn $name($($arg: $ty),*) -> $ret {
            #[cfg(target_arch = "x86_64")]
            if $crate::cpu::width() == $crate::cpu::Width::Avx512 && is_x86_feature_detected!("vpclmulqdq") {
                // SAFETY: safe code; all it needs is a CPU with its features, which was just found out.
                #[allow(unsafe_code)]
                return Some(unsafe { $body($($arg),*) });
            }
            let _ = ($($arg,)*);
            None
        }
    };
}
pub(crate) use folding;

/// The bytes in one register.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
pub(crate) fn load(line: &[u8; 64]) -> std::arch::x86_64::__m512i {
    // SAFETY: reads 64 bytes, which `line` has, at any alignment.
    #[allow(unsafe_code)]
    unsafe {
        std::arch::x86_64::_mm512_loadu_si512(line.as_ptr().cast())
    }
}

/// The register as bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
pub(crate) fn store(line: &mut [u8; 64], register: std::arch::x86_64::__m512i) {
    // SAFETY: writes 64 bytes, which `line` has, at any alignment.
    #[allow(unsafe_code)]
    unsafe {
        std::arch::x86_64::_mm512_storeu_si512(line.as_mut_ptr().cast(), register);
    }
}
