-- The bindings (dtrain.core) by themselves: concrete tensors, operations, tracing, plans, executors, data, errors. Ranks and
-- the program's exit codes are tested elsewhere; here one process, through `require` of a stock Lua.
local core = require "dtrain.core"
local support = require "support"

local here = debug.getinfo(1, "S").short_src

-- Calls f, which must fail; returns the message. The position must be this file's.
local function message(f, ...)
  local ok, e = pcall(f, ...)
  assert.is_false(ok)
  assert.is_string(e)
  assert.are.equal(here, e:match("^(.-):%d+: "))
  return e
end

local function fails(want, f, ...)
  local e = message(f, ...)
  assert.is_truthy(e:find(want, 1, true), ("got: %s\nwanted: %s"):format(e, want))
end

local function same(want, tensor) assert.are.same(want, tensor:totable()) end

describe("concrete tensors", function()
  it("come from numbers and nested lists", function()
    local t = core.tensor { { 1, 2, 3 }, { 4, 5, 6.5 } }
    assert.are.same({ 2, 3 }, t:shape())
    assert.are.equal("f32", t:dtype())
    assert.are.equal(2, t:dim())
    assert.are.equal(6, t:numel())
    assert.are.equal(3, t:size(-1))
    same({ { 1, 2, 3 }, { 4, 5, 6.5 } }, t)
    assert.are.equal("i64", core.tensor({ 1, 2 }):dtype())
    assert.are.equal("bool", core.tensor({ true, false }):dtype())
    assert.are.equal("f64", core.tensor({ 1, 2 }, "float64"):dtype())
    assert.are.equal(3.5, core.tensor(3.5):item())
    assert.are.same({}, core.tensor(3.5):shape())
    assert.are.same({ 2, 0 }, core.tensor({ {}, {} }):shape())
  end)

  it("keep whole numbers whole", function()
    local big = 2 ^ 53 | 1
    assert.are.equal(big, core.tensor({ big }):item())
    assert.are.equal("integer", math.type(core.tensor({ 3 }):item()))
    assert.are.equal(true, core.tensor({ true }):item())
  end)

  it("are filled", function()
    same({ { 0, 0 }, { 0, 0 } }, core.zeros { 2, 2 })
    same({ 1, 1, 1 }, core.ones(3, "i32"))
    same({ 7.5, 7.5 }, core.full({ 2 }, 7.5))
    same({ 0, 1, 2 }, core.arange(3))
    same({ 1, 3, 5 }, core.arange(1, 7, 2))
    same({ 0, 0.5 }, core.arange(0, 1, 0.5))
    assert.are.same(core.rand({ 5 }, 3):totable(), core.rand({ 5 }, 3):totable())
    assert.are_not.same(core.rand({ 5 }):totable(), core.rand({ 5 }):totable())
    local x = core.randn({ 20000 }, 1)
    assert.is_true(math.abs(x:mean():item()) < 0.03)
    assert.is_true(math.abs(x:square():mean():item() - 1) < 0.05)
  end)

  it("share memory in views, and copy_ and t[i] = v write through", function()
    local t = core.zeros { 2, 3 }
    local row = t[2]
    row:copy_(5)
    same({ { 0, 0, 0 }, { 5, 5, 5 } }, t)
    t[1] = core.tensor { 1, 2, 3.0 }
    t:t()[3]:copy_(core.tensor { 8, 9 })
    same({ { 1, 2, 8 }, { 5, 5, 9 } }, t)
    same({ { 2, 8 }, { 5, 9 } }, t:slice { dim = 1, start = 1, stop = 3 })
    assert.are.equal(2, #t)
    local a, b = t:split(1, { 1, 2 })
    assert.are.same({ 2, 1 }, a:shape())
    same({ { 2, 8 }, { 5, 9 } }, b)
    same({ { 1, 5 }, { 2, 5 }, { 8, 9 } }, t:permute { 1, 0 })
    same({ 1, 5, 2, 5, 8, 9 }, t:t():reshape(-1))
    same({ { 3, 3 }, { 4, 4 } }, core.tensor({ { 3 }, { 4 } }):broadcast_to { 2, 2 })
  end)

  it("print like PyTorch's", function()
    assert.are.equal("tensor([[ 1.0000, -2.5000],\n        [ 0.0000, 10.0000]], f32[2,2])",
      tostring(core.tensor { { 1, -2.5 }, { 0, 10 } }))
    assert.are.equal("tensor([1, 2], i64[2])", tostring(core.tensor { 1, 2 }))
    assert.are.equal("tensor([1., 2.], f32[2])", tostring(core.tensor({ 1, 2 }, "f32")))
    assert.are.equal("tensor(3.5000, f32[])", tostring(core.tensor(3.5)))
    assert.are.equal("tensor([ true, false], bool[2])", tostring(core.tensor { true, false }))
    assert.are.equal("tensor([], f32[0])", tostring(core.zeros { 0 }))
    assert.are.equal("tensor([   0,    1,    2, ..., 1997, 1998, 1999], i64[2000])", tostring(core.arange(2000)))
    assert.is_truthy(tostring(core.tensor { 1e-7, 1.0 }):find("1.0000e-07", 1, true))
  end)

  it("are saved and loaded, and mapped ones are not written", function()
    local dir = support.folder()
    local t = core.tensor { { 1, 2 }, { 3, 4.5 } }
    core.save(dir .. "/t.npy", t)
    same({ { 1, 2 }, { 3, 4.5 } }, core.load(dir .. "/t.npy"))
    core.save(dir .. "/t.safetensors", { b = t:t(), a = core.arange(3) })
    local back = core.load(dir .. "/t.safetensors")
    same({ { 1, 3 }, { 2, 4.5 } }, back.b)
    same({ 0, 1, 2 }, back.a)
    fails("mapped from a file", function() back.a:copy_(1) end)
    back.a:copy():copy_(1)
    fails("know .safetensors and .npy", core.load, dir .. "/t.bin")
    fails(dir .. "/absent.npy", core.load, dir .. "/absent.npy")
    fails("'a' is a number, not a tensor", core.save, dir .. "/u.safetensors", { a = 1 })
  end)

  it("survive the collector in numbers", function()
    local before = collectgarbage("count")
    for _ = 1, 200 do core.zeros { 1024, 1024 } end -- 800 MB if nothing were freed
    assert.is_true(collectgarbage("count") < before + 20000)
  end)
end)

describe("operations", function()
  it("run at once on concrete tensors", function()
    local t = core.tensor { { 1, 2 }, { 3, 4.0 } }
    same({ { 2, 3 }, { 4, 5 } }, t + 1)
    same({ { 9, 8 }, { 7, 6 } }, 10 - t)
    same({ { -1, -2 }, { -3, -4 } }, -t)
    same({ { 1, 4 }, { 9, 16 } }, t ^ 2)
    same({ { 0.5, 1 }, { 1.5, 2 } }, t / 2)
    same({ { 7, 10 }, { 15, 22 } }, t:matmul(t))
    same({ 4, 6 }, t:sum(0))
    same({ 3, 7 }, t:sum { 1 })
    same({ 3, 7 }, t:sum { dim = -1 })
    same({ { 10 } }, t:sum { 0, 1, keepdim = true })
    assert.are.equal(10, t:sum():item())
    same({ { false, false }, { true, true } }, t:gt(2))
    same({ { 1, 2, 1, 2 }, { 3, 4, 3, 4 } }, core.op("concat", { t, t }, 1))
    same({ { 1, 2 }, { 3, 4 }, { 1, 2 }, { 3, 4 } }, core.op("concat", t, t, { dim = 0 }))
    same({ { 0, 0 }, { 3, 4 } }, core.op("where", t:gt(2), t, 0))
    assert.are.equal("bf16", t:to("bf16"):dtype())
    assert.are.equal(t, t:to "f32")
    local y, mean, rstd = t:layer_norm()
    assert.are.same({ 2, 2 }, y:shape())
    same({ 1.5, 3.5 }, mean)
    assert.are.same({ 2 }, rstd:shape())
  end)

  it("promote numbers as PyTorch does", function()
    local i, h = core.tensor { 1, 2 }, core.tensor({ 1, 2 }, "bf16")
    assert.are.equal("i64", (i + 1):dtype())
    assert.are.equal("f32", (i + 1.5):dtype())
    assert.are.equal("f32", (i / 2):dtype())
    assert.are.equal("bf16", (h * 0.1):dtype())
    assert.are.equal("f64", (core.tensor({ 1 }, "f64") * 0.1):dtype())
    assert.are.equal("i64", (core.tensor { true } + 1):dtype())
    assert.are.equal("u8", (core.tensor({ 1 }, "u8") + 1):dtype())
  end)

  it("are cached by shape without mixing results", function()
    for n = 1, 300 do
      local t = core.ones { n } * n
      assert.are.equal(n * n, t:sum():item())
    end
    assert.are.equal(4, (core.ones { 2 } * 2):sum():item())
  end)

  it("are listed, with backward forms left out", function()
    local known = {}
    for _, name in ipairs(core.ops()) do known[name] = true end
    assert.is_true(known.matmul and known.gelu and known.cross_entropy)
    assert.is_nil(known.gelu_bwd or known.param or known.all_reduce or known.assign)
  end)

  it("refuse what they can't do, with the user's line", function()
    local t = core.ones { 2, 3 }
    fails("matmul: argument 2 must be a tensor or a number, got a table", t.matmul, t, {})
    fails("inner sizes 3 and 2 differ", t.matmul, t, t)
    fails("add: argument 2 must be a tensor or a number, got a string", function() return t + "1" end)
    fails("there is no operation 'sofmax'; did you mean 'softmax'?", core.op, "sofmax", t)
    fails("a tensor has no method 'sofmax'; did you mean 'softmax'?", function() return t:sofmax() end)
    fails("sum: unknown attribute 'dimz'; did you mean 'dims'?", function() return t:sum { dimz = 0 } end)
    fails("softmax: argument 2 (dim) must be a whole number, got a string", function() return t:softmax "x" end)
    fails("softmax: 'dim' must be a whole number, got 1.5", function() return t:softmax { dim = 1.5 } end)
    fails("reshape: 'shape' is missing", function() return t:reshape() end)
    fails("relu: argument 2 is a number, but the operation takes no more arguments", function() return t:relu(3) end)
    fails("relu: argument 2 is a tensor too many", function() return t:relu(t) end)
    fails("sum: 'keepdim' is given twice", function() return t:sum({ 0 }, true, { keepdim = true }) end)
    fails("to: unknown dtype 'f31'; did you mean 'f32'?", function() return t:to "f31" end)
    fails("equal lengths", core.tensor, { { 1, 2 }, { 3 } })
    fails("same depth", core.tensor, { 1, { 2 } })
    fails("an element is a string", core.tensor, { "1" })
    fails("sizes are 0 or more", core.zeros, { -1 })
    fails("more than 2^60 elements", core.zeros, { 1 << 40, 1 << 40 })
    fails("item reads tensors of one", t.item, t)
    fails("index 3 is outside 1 to 2", function() return t[3] end)
    fails("compare tensors of one element", function() return t < t end)
    fails("shapes differ", t.copy_, t, core.ones { 3 })
    fails("dim 2 is outside a tensor of 2 dims", t.size, t, 2)
    assert.is_true(core.tensor(1.0) < core.tensor(2.0))
  end)
end)

-- A linear model with a momentum optimizer in one graph; returns the plan.
local function training_plan(rows, layout)
  local g = core.graph { rows = rows }
  local x, y = g:input("inputs", "f32", { rows, 4 }), g:input("targets", "f32", { rows, 2 })
  local w, b = g:param("w", { 2, 4 }, { init = { "uniform", -0.5, 0.5 } }), g:param("b", { 2 })
  g:param("unused", { 3 })
  g:loss((core.op("linear", x, w, b) - y):square():mean())
  local function update(u, entries)
    local lr = u:hyper("lr", 0)
    for _, e in ipairs(entries) do
      if e.grad then
        local m = u:state(e.param, "m", 0)
        local v = m * 0.5 + e.grad
        u:assign(m, v)
        u:assign(e.param, e.param - lr * v)
      end
    end
  end
  return g:compile { train = true, clip = 5, layout = layout, update = update }
end

local function eval_plan(rows, layout)
  local g = core.graph { rows = rows }
  local x, y = g:input("inputs", "f32", { rows, 4 }), g:input("targets", "f32", { rows, 2 })
  local w, b = g:param("w", { 2, 4 }), g:param("b", { 2 })
  g:param("unused", { 3 })
  g:output((core.op("linear", x, w, b) - y):square():sum(), "squares")
  return g:compile { layout = layout }
end

local function regression(samples)
  return core.dataset { kind = "synthetic", inputs = { 4 }, targets = { 2 }, samples = samples, seed = 5 }
end

describe("tracing", function()
  it("gives symbols that show their shape and refuse what needs values", function()
    local g = core.graph { mesh = { { name = "data", size = 1 } } }
    local x = g:input("x", "f32", { 8, 3 })
    assert.is_true(core.is_symbolic(x))
    assert.is_true(core.is_tensor(x))
    assert.is_false(core.is_symbolic(core.ones { 1 }))
    assert.are.equal("symbol(x: f32[8,3], data: replicated)", tostring(x))
    assert.are.same({ 3, 8 }, x:t():shape())
    assert.are.same({ 8, 1 }, x:sum { 1, keepdim = true }:shape())
    assert.are.equal("f32", (x * 2):dtype())
    fails("a symbolic tensor has no value to compare", function() return x < x end)
    fails("take parts with x:slice", function() return x[1] end)
    fails("argument 1 is symbolic", x.item, x)
    fails("different graphs", function() return x + core.graph {}:input("x", "f32", { 3 }) end)
  end)

  it("turns concrete operands into constants of the graph, one for equal contents", function()
    local g = core.graph { plain_grad = true }
    local a = g:param("a", { 2, 2 }, { init = core.tensor { { 1, 2 }, { 3, 4.0 } } })
    local c = core.tensor { { 1, 0 }, { 0, 2.0 } }
    local loss = (a * a * c):sum() + (a * c:copy()):sum() * 0
    c:copy_(100) -- the trace has its own
    g:loss(loss)
    g:output(loss, "loss")
    local grads = g:grad()
    assert.are.equal("a", grads[1].name)
    g:output(grads[1].symbol, "a")
    local x = core.exec(g:compile {})
    x:ready()
    local out = x:call(0, {})
    assert.are.equal(33, out[1]:item())
    same({ { 2, 0 }, { 0, 16 } }, out[2])
    assert.are.same({ "a" }, x:names())
    x:close()
    fails("the executor was closed", x.call, x, 0, {})
  end)

  it("refuses mistakes with names", function()
    local g = core.graph {}
    local x = g:input("x", "f32", { 2 })
    fails("unknown option 'mush'; did you mean 'mesh'?", core.graph, { mush = 1 })
    fails("there is already a 'x'", g.input, g, "x", "f32", { 2 })
    fails("did you mean \"normal\"?", g.param, g, "w", { 2 }, { init = { "normel", 0, 1 } })
    fails("\"uniform\" takes 2 numbers, got 1", g.param, g, "w", { 2 }, { init = { "uniform", 0 } })
    fails("value 1 must be a number, got a string", g.param, g, "w", { 2 }, { init = { "const", "1" } })
    fails("the shapes must be equal", g.param, g, "w", { 2 }, { init = core.ones { 3 } })
    fails("only floats can be trained", g.param, g, "w", { 2 }, { dtype = "i64" })
    fails("only buffers can be written", g.assign, g, x, x)
    fails("argument 1 must be a parameter's symbol", g.state, g, x, "m", 0)
    fails("unknown kind 'rate'; known are lr and t", g.hyper, g, "rate", 0)
    fails("take its mean()", g.loss, g, x)
    fails("there is no loss", g.grad, g)
    fails("a training plan needs update = function(graph, entries)", g.compile, g, { train = true })
    fails("ranks = 4; give core.graph the mesh", g.compile, g, { ranks = 4 })
    fails("precision 'i64' is not supported", g.compile, g, { precision = "i64" })
    fails("core.graph: precision 'i64' is not supported", core.graph, { precision = "i64" })
    local low = core.graph { precision = "bf16" }
    fails("the graph was traced for precision bf16, not f16; trace it for that", low.compile, low, { precision = "f16" })
    g:output(x, "x")
    g:compile {}
    fails("the graph was compiled already", g.input, g, "y", "f32", { 2 })
    fails("symbols live only while a script is traced", function() return x + 1 end)
    assert.are.equal("symbol(of a compiled graph)", tostring(x))
  end)

  it("uses core.position where no frame of a script is", function()
    core.position(function() return "job.lua:7" end)
    local f = coroutine.wrap(core.tensor) -- no Lua frame at all
    local ok, e = pcall(f, "x")
    core.position(function() end)
    assert.is_false(ok)
    assert.are.equal("job.lua:7: tensor: argument 1 must be a number or a nested list of numbers, got a string", e)
  end)
end)

describe("plans and executors", function()
  it("train, evaluate exactly, and give the same bits again", function()
    local digests = {}
    for run = 1, 2 do
      local ds = regression(50)
      local l = core.loader(ds, { global = 16, micro = 8, seed = 1 })
      assert.are.equal(4, l:steps_per_epoch())
      local main = training_plan(8)
      local x = core.exec(main, { lr = 0.1, nominal = 16 })
      for _, n in ipairs(l:sizes()) do
        if n ~= 8 then x:add(training_plan(n, main)) end
      end
      local numbers = { [25] = x:add(eval_plan(25, main)) }
      fails("call x:ready() first", x.get, x, "w")
      x:ready()
      assert.are.equal(x:memory().total >= main:memory().total, true)
      local first, info
      for i = 1, 60 do
        info = x:step(l, info)
        first = first or info.loss
        assert.are.equal(i, info.step)
      end
      assert.is_true(info.loss < first / 10)
      assert.are.equal(0.1, info.lr)
      local el = core.loader(ds, { global = 25, eval = true })
      local sums = x:eval(numbers, el)
      assert.are.same(sums, x:eval(numbers, el))
      local w, b, want = x:get "w", x:get "b", 0
      for i = 0, 49 do
        local s = ds:get(i)
        want = want + (s.inputs:reshape(1, 4):matmul(w:t()) + b - s.targets):square():sum():item()
      end
      assert.is_true(math.abs(sums[1] - want) < 1e-4 * want)
      digests[run] = x:digest()
      x:close()
    end
    assert.are.equal(digests[1], digests[2])
  end)

  it("tell about themselves", function()
    local p = training_plan(8)
    assert.is_truthy(p:text():find("linear", 1, true))
    assert.are.same({}, p:collectives())
    assert.are.equal(16, #p:hash())
    assert.are.equal(p:hash(), training_plan(8):hash())
    assert.are.equal(8, p:rows())
    assert.is_true(p:flops() >= 2 * 2 * 8 * 4 * 2)
    local unused = p:unused()
    assert.are.equal(1, #unused)
    assert.is_truthy(unused[1]:find("^unused %(.*core_spec.lua:%d+%)$"))
    local m, sum = p:memory(), 0
    for _, k in ipairs { "parameters", "gradients", "optimizer states", "activations", "temporaries", "communication buffers",
      "inputs and buffers" } do sum = sum + m[k] end
    assert.are.equal(m.total, sum)
    assert.are.same({ "squares" }, eval_plan(3):outputs())
  end)

  it("save and continue with the same bits", function()
    local dir = support.folder()
    local ds = regression(40)
    local function make()
      local x = core.exec(training_plan(10), { nominal = 10 })
      x:ready()
      return x
    end
    local function step(exec, loader) -- the schedule's place is a part of what is saved
      exec:rate(0.1 / (1 + exec:updates()))
      exec:step(loader)
    end
    local x, l = make(), core.loader(ds, { global = 10, seed = 2 })
    for _ = 1, 5 do step(x, l) end
    assert.is_nil(core.checkpoint { dir = dir .. "/none" })
    x:save { dir = dir, keep = 2, meta = { samples = 50 } }
    for _ = 1, 4 do step(x, l) end
    local y = make()
    local saved = core.checkpoint { dir = dir }
    local meta = saved:meta()
    y:load(saved)
    assert.are.equal(5, meta.step)
    assert.are.equal(50, meta.samples)
    local again = core.loader(ds, { global = 10, seed = 2, start = meta.step })
    for _ = 1, 4 do step(y, again) end
    assert.are.equal(x:digest(), y:digest())
    local g = core.graph {}
    g:output(g:param("w", { 3, 3 }), "w")
    local z = core.exec(g:compile {})
    z:ready()
    fails("was written by another model", z.load, z, core.checkpoint { path = meta.path })
    fails("give either dir", core.checkpoint, {})
    for _, e in ipairs { x, y, z } do e:close() end
  end)

  it("set and get tensors by name", function()
    local x = core.exec(eval_plan(2))
    x:ready()
    x:set("w", core.ones({ 2, 4 }, "f64"))
    same({ { 1, 1, 1, 1 }, { 1, 1, 1, 1 } }, x:get "w")
    fails("there is no 'v'", x.get, x, "v")
    fails("did you mean 'unused'?", x.get, x, "unsed")
    fails("the shapes must be equal", x.set, x, "w", core.ones { 2 })
    fails("the plan takes 2 inputs, got 1", x.call, x, 0, { core.ones { 2, 4 } })
    fails("input 2 (targets) must be a tensor, got a number", x.call, x, 0, { core.ones { 2, 4 }, 3 })
    fails("there is no plan 3", x.call, x, 3, {})
    fails("no training plan", x.step, x, core.loader(regression(4), { global = 2 }))
    x:close()
  end)
end)

describe("data", function()
  it("reads tensors, with an order", function()
    local ds = core.dataset { kind = "tensors", inputs = core.arange(6):reshape(3, 2), targets = core.tensor { 7, 8, 9 },
      order = { 2, 0 } }
    assert.are.equal(2, ds:count())
    assert.are.same({ { name = "inputs", dtype = "i64", shape = { 2 } }, { name = "targets", dtype = "i64", shape = {} } },
      ds:fields())
    same({ 4, 5 }, ds:get(0).inputs)
    assert.are.equal(7, ds:get(1).targets:item())
    fails("sample 2 is outside the set", ds.get, ds, 2)
    fails("field 'inputs' must be a tensor, got a table", core.dataset, { kind = "tensors", inputs = {} })
    fails("their first dims must agree", core.dataset, { kind = "tensors", inputs = core.ones { 2 }, targets = core.ones { 3 } })
  end)

  it("shares one set between parts, and steps transform it", function()
    local ds = core.dataset { kind = "tensors", inputs = core.arange(10):reshape(10, 1) }
    local a, b = core.subset(ds, 0, 6), core.subset(ds, 6, 10)
    ds = nil -- luacheck: ignore
    collectgarbage()
    assert.are.equal(6, a:count())
    same({ 9 }, b:get(3).inputs)
    local t = core.transform(b, { { kind = "scale", mul = 2, add = 1 }, { kind = "reshape", shape = {} } })
    assert.are.equal(19, t:get(3).inputs:item())
    fails("no part of a set of 4", core.subset, b, 0, 5)
    fails("did you mean 'scale'?", core.transform, b, { { kind = "scael" } })
    assert.are.equal(8, core.split_at(10, 0.75))
  end)

  it("gives microbatches to a loop of one's own, each sample once", function()
    local ds = core.dataset { kind = "tensors", inputs = core.arange(10) }
    local l = core.loader(ds, { global = 4, micro = 3, eval = true })
    local seen = {}
    for batch in function() return l:next() end do
      for _, m in ipairs(batch) do
        for _, v in ipairs(m.inputs:totable()) do seen[#seen + 1] = v end
      end
    end
    assert.are.same(core.arange(10):totable(), seen)
    l:seek(2)
    assert.are.equal(2, l:next().count)
  end)

  it("calls a Lua function for each sample and keeps its error's line", function()
    local line
    local ds = core.dataset { kind = "func", samples = 5, func = function(i)
      if i == 4 then
        line = debug.getinfo(1, "l").currentline + 1
        error("no sample four")
      end
      return { i + 0.5, 2 }, i
    end }
    assert.are.same({ "f32", "i64" }, { ds:fields()[1].dtype, ds:fields()[2].dtype })
    same({ 3.5, 2 }, ds:get(3).inputs)
    assert.are.equal(3, ds:get(3).targets:item())
    local ok, e = pcall(ds.get, ds, 4)
    assert.is_false(ok)
    assert.are.equal(("%s:%d: no sample four"):format(here, line), e)
    local grows = core.dataset { kind = "func", samples = 3, func = function(i) return core.ones { i + 1 } end }
    fails("all samples need one shape", grows.get, grows, 1)
    local turns = core.dataset { kind = "func", samples = 3, func = function(i) return { i == 0 and 1 or 0.5 } end }
    fails("fractions for inputs of sample 1", turns.get, turns, 1)
    local l = core.loader(core.subset(ds, 0, 4), { global = 2, eval = true })
    same({ { 0.5, 2 }, { 1.5, 2 } }, coroutine.wrap(function() return l:next() end)()[1].inputs)
  end)

  it("refuses unknown kinds and options", function()
    fails("unknown kind 'txt'; did you mean 'text'?", core.dataset, { kind = "txt" })
    fails("kind 'text' needs 'context'", core.dataset, { kind = "text", file = "x" })
    fails("unknown option 'fiel'; did you mean 'file'?", core.dataset, { kind = "text", fiel = "x" })
    fails("/absent", core.dataset, { kind = "text", file = "/absent", context = 3 })
    fails("unknown option 'globl'; did you mean 'global'?", core.loader, regression(4), { globl = 2 })
    fails("argument 1 must be a data set, got a table", core.loader, {}, {})
  end)
end)

describe("collectives of one rank", function()
  it("give back what they got", function()
    local t = core.tensor { 1, 2.0 }
    same({ 1, 2 }, core.all_reduce(t))
    same({ 1, 2 }, core.all_reduce(t, "mean"))
    same({ { 1, 2 } }, core.all_gather(t))
    same({ 1, 2 }, core.reduce_scatter(t, "max"))
    same({ 1, 2 }, core.all_to_all(t))
    same({ 1, 2 }, core.broadcast(t, 0))
    assert.are.equal(4.5, core.all_reduce(4.5))
    core.barrier()
    fails("unknown reduction 'smu'; did you mean 'sum'?", core.all_reduce, t, "smu")
    fails("average of i64 is not defined", core.all_reduce, core.arange(2), "avg")
    fails("there is no rank 1", core.broadcast, t, 1)
    fails("all_reduce: argument 1 must be a tensor, got nil", core.all_reduce)
  end)
end)

describe("the process", function()
  it("knows ranks, time, files", function()
    assert.are.equal(0, core.rank())
    assert.are.equal(1, core.size())
    assert.is_true(core.threads() >= 1)
    local t = core.now()
    core.sleep(0.01)
    assert.is_true(core.now() - t >= 0.01)
    local dir = support.folder()
    core.mkdir_p(dir .. "/a/b")
    assert.are.equal("directory", core.exists(dir .. "/a/b"))
    assert.is_false(core.exists(dir .. "/c"))
    assert.is_true(core.columns() > 0)
    assert.is_false(core.stop_requested())
    local gpus, missing = core.devices()
    assert.is_true(gpus ~= nil or #missing > 0)
    core.ctx { seed = 4 }
    local before = core.threads()
    assert.are.equal(6, core.ones({ 6 }):sum():item())
    core.ctx { seed = 4, threads = before + 1 } -- whatever was computed before
    assert.are.equal(before + 1, core.threads())
    assert.are.equal(6, core.ones({ 6 }):sum():item())
    core.ctx { seed = 4, threads = before }
    local ok, e = pcall(core.fail, "a.lua:3", "wrong; right")
    assert.is_false(ok)
    assert.are.equal("a.lua:3: wrong; right", e)
    fails("wrong", core.fail, nil, "wrong")
  end)
end)
