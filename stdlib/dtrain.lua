-- require "dtrain": everything that a script uses, as one table. Operations work on symbolic and on concrete tensors.
local cli = require "dtrain.cli"
local core = require "dtrain.core"
local engine = require "dtrain.engine"
local job = require "dtrain.job"
local ops = require "dtrain.ops"
local scope = require "dtrain.nn.scope"
local util = require "dtrain.util"

local dt = {}
for name, f in util.sorted(ops) do dt[name] = f end

dt.nn = require "dtrain.nn"
dt.optim = require "dtrain.optim"
dt.data = require "dtrain.data"
dt.metrics = require "dtrain.metrics"
require "dtrain.collective"
dt.hooks = require "dtrain.strategy.hooks"

dt.job = job.job
dt.engine = engine.new
dt.deepspeed = require "dtrain.deepspeed"
dt.args = require "dtrain.args"
dt.value_and_grad = require "dtrain.grad"
dt.generate = require "dtrain.generate"
dt.plot = require "dtrain.plot"

-- ---- the process ----
dt.rank, dt.local_rank, dt.local_size = core.rank, core.local_rank, core.local_size
--- Ranks of the run; with `plan` and `explain` those that are planned for.
dt.size = cli.world
--- dt.init{ backend = "auto" | "mpi" | "self" }: who joins the ranks, before anything else asks for them.
function dt.init(options)
  core.backend(util.options("dt.init", options, { { "backend", "string", "auto", choices = { "auto", "mpi", "self" } } }).backend)
end
dt.version = core.version

--- Sets what initial values of concrete tensors are drawn from (a job has its own seed).
function dt.manual_seed(n) scope.seed = util.check("dt.manual_seed", n, "integer") end

-- ---- concrete tensors ----
dt.tensor, dt.zeros, dt.ones, dt.full = core.tensor, core.zeros, core.ones, core.full
dt.arange = core.arange
for name, f in util.sorted(require "dtrain.random") do dt[name] = f end
dt.load, dt.save = core.load, core.save
dt.is_symbolic, dt.is_tensor = core.is_symbolic, core.is_tensor

-- ---- communication on concrete tensors ----
dt.all_reduce, dt.all_gather, dt.reduce_scatter = core.all_reduce, core.all_gather, core.reduce_scatter
dt.broadcast, dt.all_to_all, dt.barrier = core.broadcast, core.all_to_all, core.barrier

--- dt.no_sync(f, ...): runs f(...), which must take no engine:step. A step is a whole update and reduces gradients once, after its
--- last microbatch: batch = { micro = n } accumulates, parallel = { sync = { every = n } } takes steps without communication.
function dt.no_sync(f, ...)
  util.check("dt.no_sync", f, "callable")
  local before = scope.no_sync
  scope.no_sync = true
  local out = table.pack(pcall(f, ...))
  scope.no_sync = before
  if not out[1] then error(out[2], 0) end
  return table.unpack(out, 2, out.n)
end

--- Whether two tensors have the same shape and |a - b| <= atol + rtol * |b| everywhere; options: rtol (1e-5), atol
--- (1e-8), equal_nan.
function dt.allclose(a, b, options)
  local o = util.options("dt.allclose", options, { { "rtol", "nonnegative", 1e-5 }, { "atol", "nonnegative", 1e-8 },
    { "equal_nan", "boolean", false } })
  for i, x in ipairs { a, b } do
    if not ops.is_concrete(x) then util.fail("dt.allclose: argument %d is %s, not a concrete tensor", i,
      util.show(x)) end
  end
  local x, y = a:shape(), b:shape()
  if #x ~= #y then return false end
  for i = 1, #x do if x[i] ~= y[i] then return false end end
  a, b = a:to "f64", b:to "f64"
  local near = ops.le(ops.abs(a - b), ops.abs(b) * o.rtol + o.atol)
  near = ops.maximum(near:to "f64", ops.eq(a, b):to "f64") -- equal infinities
  if o.equal_nan then near = ops.maximum(near, (ops.ne(a, a):to "f64") * (ops.ne(b, b):to "f64")) end
  return a:numel() == 0 or ops.min(near):item() == 1
end

--- Iterates over a table by sorted key, the same order in every process (pairs has none).
dt.sorted = util.sorted

-- Under a stock lua5.4 nobody takes the job that a script returns: one that is still idle when the state closes has to be told of.
if not cli.words then
  dt.at_close = setmetatable({}, { __gc = function()
    local script, idle = rawget(_G, "arg") and arg[0], job.idle()
    if not script or #idle == 0 or #idle < #job.made then return end
    local where = idle[1].where or script .. ":" -- a job that is returned at once leaves no line
    if where:sub(1, #script + 1) ~= script .. ":" then return end -- a library's affair
    io.stderr:write(("%s: this job was never trained; start the script by dtrain %s, or train it here by dt.engine(job)\n"):format(
      (where:gsub(":$", "")), script))
    os.exit(1)
  end })
end

return util.strict(dt, "dt")
