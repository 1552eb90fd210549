/* dlsym, as programs under the preload find it. It calls forebay_answer_dlsym (front_end.c) first, with the address that
   dlsym would return to. If that does not answer, it jumps to the real dlsym, which then finds the caller's return address
   as after a call. So RTLD_NEXT and RTLD_DEFAULT keep their meaning for the caller. */

#if defined(__x86_64__)

        .text
        .globl  dlsym
        .type   dlsym, @function
        .p2align 4
dlsym:
        .cfi_startproc
        endbr64
        pushq   %rdi
        .cfi_adjust_cfa_offset 8
        pushq   %rsi
        .cfi_adjust_cfa_offset 8
        subq    $8, %rsp                        /* The stack is aligned to 16 bytes at a call. */
        .cfi_adjust_cfa_offset 8
        movq    24(%rsp), %rdx
        call    forebay_answer_dlsym
        addq    $8, %rsp
        .cfi_adjust_cfa_offset -8
        popq    %rsi
        .cfi_adjust_cfa_offset -8
        popq    %rdi
        .cfi_adjust_cfa_offset -8
        testq   %rdx, %rdx
        je      1f
        ret
1:      jmp     *forebay_real_dlsym(%rip)
        .cfi_endproc
        .size   dlsym, .-dlsym

        .section .note.gnu.property, "a"
        .p2align 3
        .long   4, 16, 5                        /* Sizes of name and contents, and the type of the note. */
        .asciz  "GNU"
        .long   0xc0000002, 4, 3, 0             /* Indirect branches land on endbr64; returns are not tampered with. */

#elif defined(__aarch64__)

        .text
        .globl  dlsym
        .type   dlsym, %function
        .p2align 4
dlsym:
        .cfi_startproc
        hint    #34                             /* bti c */
        stp     x29, x30, [sp, #-32]!
        .cfi_def_cfa_offset 32
        .cfi_offset 29, -32
        .cfi_offset 30, -24
        mov     x29, sp
        stp     x0, x1, [sp, #16]
        mov     x2, x30
        bl      forebay_answer_dlsym
        mov     x9, x0
        mov     x10, x1
        ldp     x0, x1, [sp, #16]
        ldp     x29, x30, [sp], #32
        .cfi_restore 29
        .cfi_restore 30
        .cfi_def_cfa_offset 0
        cbnz    x10, 1f
        adrp    x16, forebay_real_dlsym
        ldr     x16, [x16, #:lo12:forebay_real_dlsym]
        br      x16
1:      mov     x0, x9
        ret
        .cfi_endproc
        .size   dlsym, .-dlsym

        .section .note.gnu.property, "a"
        .p2align 3
        .long   4, 16, 5
        .asciz  "GNU"
        .long   0xc0000000, 4, 1, 0             /* Indirect branches land on bti. */

#else
#error "the preload's dlsym is written for x86-64 and aarch64"
#endif

        .section .note.GNU-stack, "", %progbits
