-- From `parallel = { ... }` to what the compiler is told. A strategy is a table of verbs, each of which may be missing; the
-- library's own are files of this form, and a script adds its own with strategies = { ... }. docs/parallelism.md shows each verb by an
-- example.
--
--   name                     for messages
--   options                  rows of util.options: the keys of `parallel` that it reads
--   check(p)                 p: the checked options of all strategies; refuses what can't be honoured
--   axes(p)                  list of { name =, size = n or "auto", splits = "samples" or "stages" or nil }
--   rewrite(g, p, mesh)      on the traced graph: g:replace(node, f) puts what f composes in a node's place; nodes are entries of
--                            g:nodes()
--   place(g, p, mesh)        g:place(what, { axis = "S(0)" }) says where a parameter, an input or what a node makes lies
--   rule(node, axis, p)      where an operation's inputs must lie on an axis and its results then do (rule.lua); nil: as the
--                            library says
--   precision(node, p)       the dtype in which an operation computes: "f32", "bf16", "f16", or nil (the job's)
--   recompute(g, p)          what backward makes again: { ops =, segments =, communication = }, or nil
--   buckets(parameters, p)   list of lists of names: which gradients travel together, first things first; nil: by size
--   keep(parameter, p)       nil (whole), or { states =, gradients =, parameters = lists of axes that share them, gather = "use" or
--                            "step", each = "micro" or "step" }
--   reduce(bucket, info, p)  traced: a partial sum over info.axes becomes the sum, or the rank's share of it; nil: the default
--   gather(share, info, p)   traced: a share of a bucket's parameters becomes the whole bucket; nil: the default
--   update(entry, g, p)      traced: what stands around the optimizer (update.lua); returns the new value
--   replicas(p)              "equal" (nil), "differ", or "alone": with other first values, each seeing every sample
--   between                  { every = function(p) -> steps or nil, declare = function(g, p) (in the training graph),
--                            trace = function(g, p) }: a plan of its own that runs after every so many steps
--   wire(p)                  how gradients travel where buckets and reduce say nothing: { bucket_mb =, first_bucket_mb =, dtype =,
--                            by_registration = }, each of which one strategy may say
--   cut(g, p)                where stages 1, 2, ... of an axis of stages begin: for each a parameter's name, or a list of names; nil:
--                            balanced
--   schedule                 { place = function(stage, ranks, chunks) -> rank, order = function(rank, ranks, microbatches, chunks) ->
--                            actions, chunks = stages a rank }, or a function of p that returns one or nil (stages.lua)
--   fit(p, how, make)        make() compiles a plan with what p says now; fit calls it until the plan fits
--   variants                 rows { key, { values, the plain one first } }: what `dtrain check --all` tries beside the library's own
local core = require "dtrain.core"
local rule = require "dtrain.strategy.rule"
local stages = require "dtrain.strategy.stages"
local util = require "dtrain.util"

local M = {}

local own = { "data", "zero", "local_sgd", "tensor", "pipeline", "recompute" }
local library = {}
for _, name in ipairs(own) do -- a file that is taken away takes its strategy with it, and no other
  local ok, s = pcall(require, "dtrain.strategy." .. name)
  if ok then library[#library + 1] = s
  elseif not tostring(s):find("module 'dtrain.strategy." .. name .. "' not found", 1, true) then error(s, 0) end
end

local form = { { "name", "string" }, { "options", "table" }, { "check", "function" }, { "axes", "function" },
  { "rewrite", "function" }, { "place", "function" }, { "rule", "function" }, { "precision", "function" },
  { "recompute", "function" },
  { "buckets", "function" }, { "keep", "function" }, { "reduce", "function" }, { "gather", "function" },
  { "update", "function" }, { "replicas", "function|string" }, { "between", "table" }, { "wire", "function" },
  { "fit", "function" }, { "variants", "table" }, { "cut", "function" }, { "schedule", "function|table" } }

--- The names of all verbs.
M.verbs = util.map(form, function(row) return row[1] end)

local Strategy = { __name = "strategy" }
Strategy.__index = Strategy

--- Checks `parallel` and returns what engine and trace ask: s.p (all options), s:mesh(ranks), s:place(graph, mesh, train),
--- s:compile(options, graph, how).
function M.new(given)
  local rows = { { "mesh", "table" }, { "strategies", "table", {} } }
  local list = table.move(library, 1, #library, 1, {})
  for i, s in ipairs(given.strategies or {}) do
    local label = ("dt.job: parallel: strategies[%d]"):format(i)
    list[#list + 1] = util.options(label, s, form)
    list[#list].name = s.name or ("strategies[%d]"):format(i)
    list[#list].scripts = true
  end
  local from = { mesh = "dtrain", strategies = "dtrain" }
  for _, s in ipairs(list) do
    for _, row in ipairs(s.options or {}) do
      if from[row[1]] then
        util.fail("dt.job: parallel: the option %s of strategy %s is %s's already; give it another name", row[1], s.name, from[row[1]])
      end
      from[row[1]] = s.name
      rows[#rows + 1] = row
    end
  end
  local self = setmetatable({ list = list, p = util.options("dt.job: parallel", given, rows) }, Strategy)
  for _, s in ipairs(list) do if s.check then s.check(self.p) end end
  self:schedule()
  return self
end

-- ---- the mesh ----
-- Axes lie in this order unless the script says another: stages far apart, parts of tensors close together.
local outermost = { stages = 1, samples = 2 }

local AXES, LETTERS = core.limits.axes, core.limits.letters -- of a mesh, and of an axis's name, at most

local function check_axis(s, axis, i, seen)
  local where = ("dt.job: parallel: axis %d of strategy %s"):format(i, s.name)
  axis = util.options(where, axis, { { "name", "string", required = true }, { "size", "string|count", required = true },
    { "splits", "string", choices = { "samples", "stages" } } })
  if type(axis.size) == "string" and axis.size ~= "auto" then
    util.fail("%s: size wants \"auto\" or a number of ranks, got %s", where, util.show(axis.size))
  end
  if #axis.name > LETTERS then
    util.fail("%s: the name %q has %d letters; at most %d can be", where, axis.name, #axis.name, LETTERS)
  end
  if seen[axis.name] then
    util.fail("dt.job: parallel: two strategies add the axis %q; give the one of %s another name", axis.name, s.name)
  end
  if axis.size == "auto" and s.scripts and seen.auto and not seen.scripts then -- the library's gives way to the script's
    seen[seen.auto].size, seen.auto = 1, nil
  end
  seen.scripts = seen.scripts or (axis.size == "auto" and s.scripts)
  local other = axis.splits == "stages" and seen.stages and seen[seen.stages]
  if other and other.size == 1 then other.splits, seen.stages = nil, nil end -- an axis of one rank gives way
  if other and other.size ~= 1 and axis.size == 1 then axis.splits = nil end
  for _, key in ipairs { axis.splits == "stages" and "stages" or false, axis.size == "auto" and "auto" or false } do
    if key and seen[key] then
      util.fail("dt.job: parallel: the axes %s and %s both %s; one can", seen[key], axis.name,
        key == "auto" and "take what is left of the ranks (size = \"auto\")" or "split stages")
    end
    if key then seen[key] = axis.name end
  end
  seen[axis.name] = axis
  return axis
end

--- All strategies' axes as they give them, in the order in which they lie on the mesh.
function Strategy:axes()
  local list, seen = {}, {}
  for _, s in ipairs(self.list) do
    for i, axis in ipairs(s.axes and s.axes(self.p) or {}) do list[#list + 1] = check_axis(s, axis, i, seen) end
  end
  if #list > AXES then
    util.fail("dt.job: parallel: the strategies have %d axes (%s); at most %d can be: make one of two, or leave a strategy out", #list,
      table.concat(util.map(list, function(a) return a.name end), ", "), AXES)
  end
  local at = {}
  for i, axis in ipairs(list) do at[axis] = 1000 * (outermost[axis.splits] or 3) + i end
  if self.p.mesh then
    for _, name in ipairs(self.p.mesh) do
      local axis = seen[name]
      if type(axis) ~= "table" then
        util.fail("dt.job: parallel: mesh: there is no axis %s; %s", util.show(name),
          util.suggest(tostring(name), util.map(list, function(a) return a.name end)))
      end
      if axis.named then util.fail("dt.job: parallel: mesh names the axis %q twice", name) end
      axis.named = true
    end
    for _, axis in ipairs(list) do
      if not axis.named and axis.size ~= 1 then
        util.fail("dt.job: parallel: mesh = { ... } leaves out the axis %q of size %s; name every axis, outermost first",
          axis.name, axis.size)
      end
    end
    for i, name in ipairs(self.p.mesh) do at[seen[name]] = i end
  end
  table.sort(list, function(a, b) return at[a] < at[b] end)
  return list
end

-- "data = 2 x pipeline 2": axes of samples first, then by name; those of one rank are left out.
local function equation(axes)
  local list, terms, product = {}, {}, 1
  for _, a in ipairs(axes) do if a.size ~= "auto" and a.size > 1 then list[#list + 1] = a end end
  table.sort(list, function(a, b)
    if (a.splits == "samples") ~= (b.splits == "samples") then return a.splits == "samples" end
    return a.name < b.name
  end)
  for i, a in ipairs(list) do
    terms[i] = ("%s %d"):format(a.name, a.size)
    product = product * a.size
  end
  return #terms > 0 and table.concat(terms, " x ") or "1", product, #terms
end

--- The mesh of so many ranks: { { name =, size =, splits = "samples" | "stages" | nil } ... }, outermost axis first. An error shows
--- the equation.
function Strategy:mesh(ranks)
  local axes, rest = self:axes(), nil
  local text, product, terms = equation(axes)
  for _, a in ipairs(axes) do if a.size == "auto" then rest = a end end
  if rest and ranks % product ~= 0 then
    local low = ranks // product * product
    util.fail("dt.job: parallel: %d rank%s not divide by %s = %d; %s%d ranks would", ranks, ranks == 1 and " does" or "s do", text,
      product, low > 0 and low .. " or " or "", low + product)
  elseif not rest and product ~= ranks then
    local hint, samples, others = "", {}, product
    for _, a in ipairs(axes) do if a.splits == "samples" then samples[#samples + 1], others = a, others // a.size end end
    if #samples == 1 and ranks % others == 0 then hint = (' or %s = "auto" (%d)'):format(samples[1].name, ranks // others) end
    util.fail("dt.job: parallel: %s%s, but %d rank%s run; mpirun -n %d%s would do", terms > 0 and text:gsub(" ", " = ", 1) or
      "no axis has more than one rank", terms > 1 and " = " .. product or "", ranks, ranks == 1 and "" or "s", product, hint)
  end
  return util.map(axes, function(a)
    return { name = a.name, size = a == rest and ranks // product or a.size, splits = a.splits }
  end)
end

--- The axes of a mesh that have more than one rank, for people to read.
function M.wide(mesh)
  local out = {}
  for _, a in ipairs(mesh) do if a.size > 1 then out[#out + 1] = a end end
  return out
end

--- Which of the ranks that differ only on axes that split `what` ("samples", "stages") a rank is, from 0, and how many those are.
function M.among(mesh, rank, what)
  local at, n, below = 0, 1, 1
  for i = #mesh, 1, -1 do
    if mesh[i].splits == what then
      at = at + rank // below % mesh[i].size * n
      n = n * mesh[i].size
    end
    below = below * mesh[i].size
  end
  return at, n
end

-- ---- asking ----
local wire_rows = { { "bucket_mb", "positive" }, { "first_bucket_mb", "positive" },
  { "dtype", "string", choices = { "f32", "bf16", "f16" } }, { "by_registration", "boolean" } }

--- How gradients travel, into what graph:compile is told; without a strategy that says so in the job's dtype.
function Strategy:wire(options)
  local from = {}
  options.wire = options.precision
  for _, s in ipairs(self:with "wire") do
    local answer = util.options(("wire of strategy %s"):format(s.name), s.wire(self.p), wire_rows, util.defined_at(s.wire))
    for key, v in util.sorted(answer) do
      if from[key] then
        util.fail("dt.job: parallel: the strategies %s and %s both say %s of wire; leave one of them out", from[key], s.name, key)
      end
      from[key], options[key == "dtype" and "wire" or key] = s.name, v
    end
  end
end

--- The one answer to a question that one strategy may answer: nil, or what ask(s) returned; two answers are an error.
function Strategy:one(what, ask)
  local answer, from
  for _, s in ipairs(self.list) do
    if s[what] then
      local a = ask(s)
      if a ~= nil and answer ~= nil then
        util.fail("dt.job: parallel: the strategies %s and %s both say %s; leave one of them out", from.name, s.name, what)
      end
      if a ~= nil then answer, from = a, s end
    end
  end
  return answer
end

--- The strategies that have a verb, in order.
function Strategy:with(verb) return util.filter(self.list, function(s) return s[verb] ~= nil end) end

--- Whether replicas are "equal", "differ" or are "alone".
function Strategy:replicas()
  return self:one("replicas", function(s)
    local r = s.replicas
    if type(r) == "function" then r = r(self.p) end
    if r ~= nil and not util.contains({ "equal", "differ", "alone" }, r) then
      util.fail("dt.job: parallel: replicas of %s is \"equal\", \"differ\" or \"alone\", got %s", s.name, util.show(r))
    end
    return r
  end) or "equal"
end

--- What orders the stages (stages.lua): the schedule that a strategy gives, or 1F1B.
function Strategy:schedule()
  self.order = self.order or stages.new(self:one("schedule", function(s)
    if type(s.schedule) == "table" then return s.schedule end
    return s.schedule(self.p)
  end) or "1f1b", self.p.chunks)
  return self.order
end

--- The dtypes in which operations compute, where strategies say so.
function Strategy:precision(graph)
  if #self:with "precision" == 0 then return end
  for _, n in ipairs(util.filter(graph:nodes(), function(n) return #n.inputs > 0 end)) do
    local dtype = self:one("precision", function(s)
      local d = s.precision(n, self.p)
      if d ~= nil and not util.contains({ "f32", "bf16", "f16" }, d) then
        util.fail_at(util.defined_at(s.precision), "precision of strategy %s, for %s: \"f32\", \"bf16\", \"f16\" or nil, got %s",
          s.name, n.op, util.show(d))
      end
      return d
    end)
    if dtype then graph:precision(n, dtype) end
  end
end

--- What the strategies say of the traced graph, in whole shapes: what persists besides the model (in training), what is computed
--- otherwise, where things lie, and what backward makes again.
function Strategy:place(graph, mesh, train)
  local p = self.p
  for _, s in ipairs(train and self:with "between" or {}) do if s.between.declare then s.between.declare(graph, p) end end
  for _, s in ipairs(self:with "rewrite") do s.rewrite(graph, p, mesh) end
  for _, s in ipairs(self:with "place") do s.place(graph, p, mesh) end
  graph:settle()
  self:precision(graph)
  local again = self:one("recompute", function(s) return s.recompute(graph, p) end)
  if again then graph:recompute(again) end
end

--- The plan that make() compiles, when the strategies' limits are met.
function Strategy:fit(how, make)
  for _, s in ipairs(self:with "fit") do
    local inner = make
    make = function() return s.fit(self.p, how, inner) end
  end
  return make()
end

local Info = {} -- what reduce and gather know: docs/parallelism.md
Info.__index = Info
function Info:state(name, shape, o)
  return self.graph:local_state(("%s.bucket%d:%s"):format(self.verb, self.number, name), shape, o)
end
function Info:assign(state, value) self.graph:assign(state, value) end

local function same(a, b)
  for i = 1, math.max(#a, #b) do if a[i] ~= b[i] then return false end end
  return true
end

-- A verb that is traced for a bucket, as graph:compile calls it.
local function traced(self, verb)
  if #self:with(verb) == 0 then return nil end
  return function(graph, bucket, number, parameters, axes)
    table.sort(parameters, function(a, b) return a.begin < b.begin end)
    local info = setmetatable({ graph = graph, verb = verb == "reduce" and "hook" or verb, number = number, axes = axes,
      parameters = parameters, ranks = core.axes_size(bucket, axes) }, Info)
    return self:one(verb, function(s)
      local out = s[verb](bucket, info, self.p)
      if out == nil then return nil end
      local at = util.defined_at(s[verb])
      if not core.is_symbolic(out) then
        util.fail_at(at, "%s of strategy %s must return the bucket, got %s (%s)", verb, s.name, util.show(out), util.kind(out))
      end
      if not util.contains({ "f32", "bf16", "f16", "f64" }, out:dtype()) then
        util.fail_at(at, "%s of strategy %s returned %s; it must be a float", verb, s.name, out:dtype())
      end
      if verb == "reduce" and not same(out:shape(), bucket:shape()) and out:numel() * info.ranks < bucket:numel() then
        util.fail_at(at, "reduce of strategy %s returned shape %s for a bucket of shape %s; it must keep the shape, or be a share",
          s.name, util.show(out:shape()), util.show(bucket:shape()))
      end
      return out
    end)
  end
end

--- What graph:compile is told besides the job's own.
function Strategy:compile(options, graph, how)
  local p = self.p
  options.replicas, options.rule = self:replicas(), rule.new(self)
  self:wire(options)
  if #self:with "keep" > 0 then
    options.keep = function(q) return self:one("keep", function(s) return s.keep(q, p) end) end
  end
  if options.train then
    if #self:with "buckets" > 0 then
      options.buckets = function(list) return self:one("buckets", function(s) return s.buckets(list, p) end) end
    end
    options.reduce = traced(self, "reduce")
  end
  options.gather = traced(self, "gather")
  local _, ranks = M.among(how.where.mesh, how.where.rank, "stages")
  if ranks == 1 then return end
  local starts
  if options.train and not how.layout then starts = self:one("cut", function(s) return s.cut(graph, p) end) end
  options.stages = self:schedule():plan(ranks, options.train and how.micros, starts)
end

return M
