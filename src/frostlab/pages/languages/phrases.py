"""The fixed texts of a comparison's page in Chinese and Japanese.

In a text, a word in braces, such as `{name}`, stands for any words, and `{sign}` for one character.
The words that it stands for are kept as they are, but those of `{reason}` are translated, too. A
text that is not found as a whole is looked up sentence by sentence, and then clause by clause.
"""

import re
from functools import cache

from frostlab.comparison.judging.verdict import MEANINGS
from frostlab.pages.languages.words import TRANSLATIONS

_FOREIGN = tuple(TRANSLATIONS)
LANGUAGES = ("en", *_FOREIGN)
_UNKNOWN = {"zh": "原因见记录", "ja": "理由は記録を参照"}
_REASON = re.compile(r" is unproven \((.*)\): (?=[-+\d]|no pair)", re.DOTALL)
# English, Chinese, Japanese
_TEXTS: tuple[tuple[str, str, str], ...] = (
    # Headings
    ("light or dark", "浅色／深色", "ライト／ダーク"),
    ("Files:", "文件：", "ファイル："),
    (".", "。", "。"),
    ("Verdicts", "结论", "判定"),
    ("The questions", "研究问题", "研究の問い"),
    ("The arms", "各组", "各群"),
    ("Performance", "性能", "性能"),
    ("Training curves", "训练曲线", "学習曲線"),
    ("Time", "时间", "時間"),
    ("Convergence", "收敛", "収束"),
    ("Tuning", "调参", "チューニング"),
    ("Stages", "训练阶段", "学習の段階"),
    ("Subjects", "受试者", "被験者"),
    ("Gradient flow", "梯度流", "勾配の流れ"),
    ("Parameters and memory", "参数与内存", "パラメータとメモリ"),
    ("Generated texts", "生成的文本", "生成されたテキスト"),
    ("What differs between the arms", "各组之间的差别", "群間の違い"),
    ("Data", "数据", "データ"),
    ("Environment", "运行环境", "実行環境"),
    ("The rules", "规则", "規則"),
    ("Every run", "全部运行", "すべての実行"),
    ("Notes and tags", "备注与标签", "メモとタグ"),
    ("Methods", "方法", "方法"),
    # The first screen
    ("What does {arms} change, compared with {baseline}, on {metric}?",
     "与 {baseline} 相比，{arms} 会使 {metric} 发生什么变化？",
     "{baseline} と比べて、{arms} は {metric} をどう変えるか。"),
    (" or ", " 或 ", " または "),
    ("Caution: ", "注意：", "注意："),
    ("A quick comparison with short runs: it shows no more than whether a full one is worthwhile.",
     "这是用短时运行做的快速比较，只能说明是否值得做完整的比较。",
     "短い実行による簡易比較であり、本格的な比較を行う価値があるかどうかしか示さない。"),
    ("The runs were chosen after they had ended, so the statements hold only if the choice did not "
     "depend on their results.",
     "这些运行是在结束之后才选入比较的，因此只有在选择不依赖其结果时，结论才成立。",
     "実行は終了後に選ばれたため、選択が結果に依存しなかった場合に限り結論は成り立つ。"),
    ("{name} is confounded: it also differs from {baseline} in ",
     "{name} 存在混杂，它与 {baseline} 还有以下不同：",
     "{name} には交絡があり、{baseline} とは次の点も異なる："),
    (" differ together, so none of them alone is shown to be the cause.",
     " 同时不同，不能断定其中任何一个单独是原因。",
     " が同時に異なるため、そのいずれか一つが原因であるとは言えない。"),
    ("The times of steps are unproven: ", "单步耗时未经证实：",
     "ステップ時間は実証されていない："),
    (" Confounded by ", " 混杂因素：", " 交絡要因："),
    ("Too many looks at the results: ", "查看结果的次数过多：", "結果を見る回数が多すぎた："),
    (", seed ", "，种子 ", "、シード "),
    (", is not paired: ", " 未能配对：", " は対にできない："),
    ("Further doubts are listed under “Verdicts” and “What differs between the arms”.",
     "其余疑点列于“结论”和“各组之间的差别”之下。",
     "その他の疑問点は「判定」と「群間の違い」に記す。"),
    # Next to the verdicts
    ("The same run twice ({baseline}, seed ", "同一次运行重复两遍（{baseline}，种子 ",
     "同じ実行を二回行った結果（{baseline}、シード "),
    ("): {metric} ", "）：{metric} ", "）：{metric} "),
    (" and ", " 和 ", " と "),
    (", the same weights. Any difference is the noise of the device and the evaluation.",
     "，权重相同。两者的任何差异都来自设备和评估的噪声。",
     "、重みは同一。差があれば、それは装置と評価の雑音である。"),
    (", different weights. Any difference is the noise of the device and the evaluation.",
     "，权重不同。两者的任何差异都来自设备和评估的噪声。",
     "、重みは異なる。差があれば、それは装置と評価の雑音である。"),
    ("The run of {baseline} with seed ", "{baseline} 的一次运行，种子为 ",
     "{baseline} の実行、シードは "),
    (", trained a second time: ", "，第二次训练的结果：", "、二回目の学習の結果："),
    ("The planted harm, a baseline that trained for ", "人为植入的损害，即一个只训练了 ",
     "意図的に加えた劣化、すなわち "),
    (" steps instead of ", " 步（而非 ", " ステップだけ学習したベースライン（本来は "),
    (", was found: ", " 步）的基线，已被发现：", " ステップ）は検出された："),
    (", is no harm here, so it tests nothing: ", " 步）的基线，在此并非损害，因此什么也检验不了：",
     " ステップ）はここでは劣化ではないため、何も検証しない："),
    (", was not found, so this comparison cannot see a harm of that size: ",
     " 步）的基线，未被发现，因此本比较看不出这样大小的损害：",
     " ステップ）は検出されなかった。したがってこの比較ではその大きさの劣化は見えない："),
    ("Statements about {metric}: ", "关于 {metric} 的结论个数：", "{metric} に関する判定の数："),
    (". If no arm differed, at most ", "。如果各组其实没有差异，此类比较中至多有 ",
     "。どの群にも差がないとき、この種の比較のうち多くとも "),
    (" of such comparisons would call any arm better or worse",
     " 会把某组判为更好或更差", " が、いずれかの群を優れている、または劣っていると判定する"),
    (" of such comparisons would call any arm better or worse, and at most ",
     " 会把某组判为更好或更差，至多有 ",
     " が、いずれかの群を優れている、または劣っていると判定し、多くとも "),
    (" any arm faster or slower", " 会把某组判为更快或更慢",
     " が、いずれかの群を速い、または遅いと判定する"),
    ("This is ", "本次查看结果：", "今回の確認："),
    ("An earlier look: ", "先前查看过一次：", "以前の確認："),
    (" seeds, in ", " 个种子，位于 ", " シード、場所は "),
    ("“{word}” means: {reason}.", "“{word}”的含义：{reason}。", "「{word}」の意味：{reason}。"),
    (" Note: ", " 注：", " 注："),
    ("(Compares how much the best value of the metric changed from the first stage to the last, on "
     "the split that also selects the checkpoint.) ",
     "（比较的是最佳值从第一阶段到最后阶段的变化，所用数据也用于选择检查点。）",
     "（最良値が最初の段階から最後の段階までにどれだけ変化したかを、チェックポイントの選択にも使う"
     "データで比較する。）"),
    # Remarks about a verdict, and reasons why it is unproven
    ("failed", "失败", "失敗"),
    ("did not finish", "未完成", "未完了"),
    ("diverged", "发散", "発散"),
    ("stopped", "被中止", "停止"),
    ("did not finish and failed", "未完成或失败", "未完了または失敗"),
    ("diverged and failed", "发散或失败", "発散または失敗"),
    ("did not finish and diverged", "未完成或发散", "未完了または発散"),
    ("ended with {value}", "结果为 {value}", "結果が {value}"),
    ("{count} of {all} runs of {name} {reason}, so the values are not known",
     "{name} 的 {all} 次运行中有 {count} 次{reason}，数值未知",
     "{name} の {all} 回の実行のうち {count} 回が{reason}のため、値が不明"),
    ("the same command tries them again", "用同一命令可重试", "同じコマンドで再試行できる"),
    ("finish them with frostlab run --resume, and compare the runs again",
     "请用 frostlab run --resume 完成它们，再重新比较",
     "frostlab run --resume で完了させてから比較し直すこと"),
    ("both runs of every pair have the same value, so no noise is seen",
     "每一对的两次运行数值相同，看不到噪声", "どの組でも二つの実行の値が同じで、雑音が見えない"),
    ("all {count} differences are equal ({size})", "全部 {count} 个差值都相等（{size}）",
     "{count} 個の差がすべて等しい（{size}）"),
    ("noise is not like that", "噪声不会如此", "雑音はそのようにはならない"),
    ("the best {key} of {name}, {value}, is at an end of the grid, so a better one may lie beyond",
     "{name} 的最佳 {key}（{value}）位于网格的一端，网格之外可能还有更好的值",
     "{name} の最良の {key}（{value}）は格子の端にあり、その外にもっと良い値があるかもしれない"),
    ("at every {key} tried, a run of {name} did not finish",
     "在尝试过的每个 {key} 下，{name} 都有一次运行未完成",
     "試したどの {key} でも、{name} の実行に未完了のものがあった"),
    ("{name} was tuned with a run that does not fit, {run}: {reason}",
     "{name} 是用不相符的运行 {run} 调参的：{reason}",
     "{name} は合わない実行 {run} で調整された：{reason}"),
    ("the data differ from those of the first finished run ({name})",
     "数据与最先完成的运行（{name}）不同", "データが最初に完了した実行（{name}）と異なる"),
    ("the pretrained weights differ from those of {name}, seed {seed}",
     "预训练权重与 {name} 的种子 {seed} 不同",
     "事前学習済みの重みが {name} のシード {seed} と異なる"),
    ("the seeds differ ({a} and {b})", "种子不同（{a} 和 {b}）", "シードが異なる（{a} と {b}）"),
    ("the data differ ({a} and {b})", "数据不同（{a} 和 {b}）", "データが異なる（{a} と {b}）"),
    ("the pretrained weights differ ({a} and {b})", "预训练权重不同（{a} 和 {b}）",
     "事前学習済みの重みが異なる（{a} と {b}）"),
    ("the order of examples differs in the first {step} steps ({a} and {b})",
     "到第 {step} 步为止样本的顺序不同（{a} 和 {b}）",
     "ステップ {step} までに例の順序が異なる（{a} と {b}）"),
    ("the initial weights of {name} differ, though neither treatment changes them",
     "{name} 的初始权重不同，而两种处理都不改变它",
     "{name} の初期の重みが異なるが、どちらの処理もこれを変えない"),
    ("only one of the two runs has the weights {name}", "两次运行中只有一次有权重 {name}",
     "二つの実行のうち一方にしか重み {name} がない"),
    ("seeds that only {name} has are left out: {seeds}", "略去只有 {name} 才有的种子：{seeds}",
     "{name} だけにあるシードは除いた：{seeds}"),
    ("seeds that neither arm finished are left out: {seeds}", "略去两组都未完成的种子：{seeds}",
     "両群とも完了しなかったシードは除いた：{seeds}"),
    ("an effect of interest, {size}, may have been missed", "可能漏掉了所关注大小（{size}）的效应",
     "関心のある大きさ（{size}）の効果を見逃したかもしれない"),
    ("for other test examples of the same kind: {effect} ({confidence} %: {low} to {high})",
     "对同类的其他测试样本：{effect}（{confidence} %：{low} 至 {high}）",
     "同種の他のテスト例については {effect}（{confidence} %：{low} から {high}）"),
    ("a difference is not shown for them", "对它们没有证实差异", "それらについて差は示されない"),
    ("unproven: {reason}", "未经证实：{reason}", "未実証：{reason}"),
    ("runs chosen after the fact: no plan was made before the results were known, so the "
     "false-alarm rate holds only if the choice of the runs did not depend on their results",
     "事后选定的运行：在结果已知之前没有制定计划，因此只有在运行的选择不依赖其结果时，"
     "误报率才成立",
     "事後に選ばれた実行：結果がわかる前に計画がなかったため、実行の選択が結果に依存しなかった"
     "場合に限り誤検出率が成り立つ"),
    ("untuned: both arms have {key} {value}, and no record shows that it was tuned for each arm "
     "with an equal budget",
     "未调参：两组的 {key} 都是 {value}，没有记录表明它曾以相同的预算为每组调过",
     "未調整：両群の {key} はともに {value} であり、同じ予算で群ごとに調整された記録がない"),
    ("look {look} of {looks} planned: it spends {level} of alpha = {alpha}",
     "计划查看 {looks} 次，这是第 {look} 次：用去 alpha = {alpha} 中的 {level}",
     "予定した {looks} 回の確認のうち {look} 回目：alpha = {alpha} のうち {level} を使う"),
    ("look {look} at this question: it spends {level} of alpha, and all looks together spend at "
     "most {alpha}",
     "第 {look} 次查看这一问题：用去 alpha 中的 {level}，各次合计至多用去 {alpha}",
     "この問いの {look} 回目の確認：alpha のうち {level} を使い、全体で多くとも {alpha} を使う"),
    ("look {look} at this question: it spends {level} of alpha, but earlier looks had spent "
     "{spent}, so the false-alarm rate of all looks so far is up to {risk}",
     "第 {look} 次查看这一问题：用去 alpha 中的 {level}，但先前各次已用去 {spent}，"
     "因此迄今各次合计的误报率可达 {risk}",
     "この問いの {look} 回目の確認：alpha のうち {level} を使うが、以前の確認で {spent} を使って"
     "いたため、これまでの誤検出率は最大 {risk} になる"),
    ("the models were built too few times: {builds} of at least {least} (raise clock.seconds)",
     "构建次数太少：至少需要 {least} 次，实际 {builds} 次（请增大 clock.seconds）",
     "構築の回数が少なすぎる：少なくとも {least} 回必要で、実際は {builds} 回（clock.seconds を"
     "増やすこと）"),
    ("the time of {name}, a copy of the baseline, is not that of the others: {ratio}",
     "{name} 与基线的其他副本不同：{ratio}", "{name} がベースラインの他の複製と異なる：{ratio}"),
    ("{name}, seed {seed}: {reason}", "{name}，种子 {seed}：{reason}",
     "{name}、シード {seed}：{reason}"),
    ("seed {seed}: {reason}", "种子 {seed}：{reason}", "シード {seed}：{reason}"),
    # Titles of figures
    ("Difference from the baseline, seed by seed", "各种子与基线之差",
     "シードごとのベースラインとの差"),
    ("Mean {metric} of each arm", "各组 {metric} 的均值", "各群の {metric} の平均"),
    ("{metric} on the {split} split during training", "训练中 {split} 数据上的 {metric}",
     "学習中の {split} データでの {metric}"),
    ("{metric} on the {split} split against time", "{split} 数据上的 {metric} 与时间",
     "{split} データでの {metric} と時間"),
    ("{metric} on the {split} split against FLOPs", "{split} 数据上的 {metric} 与计算量",
     "{split} データでの {metric} と計算量"),
    ("Training loss", "训练损失", "学習損失"),
    ("Time of a training step during the runs", "运行中的单步耗时", "実行中のステップ時間"),
    ("Time of a step, against the baseline", "单步耗时与基线之比", "ステップ時間のベースライン比"),
    ("Time of a whole run, against the baseline", "整次运行耗时与基线之比",
     "実行全体の時間のベースライン比"),
    ("Time of a whole run", "整次运行的耗时", "実行全体の時間"),
    ("Response to the {setting}", "对 {setting} 的响应", "{setting} への応答"),
    ("Gradient flow, against the baseline", "梯度流与基线之比", "勾配の流れのベースライン比"),
    ("Gradients by layer and step", "各层各步的梯度", "層とステップごとの勾配"),
    ("Parameters", "参数", "パラメータ"),
    ("Memory", "内存", "メモリ"),
    ("{metric} against the share that trains", "{metric} 与可训练参数的占比",
     "{metric} と学習する割合"),
    ("r by subject: {split}", "各受试者的 r：{split}", "被験者ごとの r：{split}"),
    ("Decoded envelopes: {split}", "解码的包络：{split}", "復号した包絡：{split}"),
    ("Electrodes that {name} reads", "{name} 读取的电极", "{name} が読む電極"),
    # Captions
    ("Pearson's r of each subject in the first run of each arm shown.",
     "图中各组第一次运行中每位受试者的皮尔逊 r。",
     "図示した各群の最初の実行における各被験者のピアソンの r。"),
    ("The grey bars are the range by chance, in which nine of ten correlations of the first arm "
     "with mismatched envelopes lie.",
     "灰条是随机范围：第一组与错配包络的相关有九成落在其中。",
     "灰色の帯は偶然の範囲で、最初の群と対応しない包絡との相関の九割がこの中にある。"),
    ("{name}: the envelope of the heard speech, and the envelopes that the first runs of the arms "
     "decoded, each with mean zero and variance one, in the middle of the recording.",
     "{name}：所听语音的包络，以及图中各组第一次运行解码的包络，均标准化为零均值、单位方差，"
     "取自录音中段。",
     "{name}：聞いた音声の包絡と、図示した各群の最初の実行が復号した包絡。平均 0、分散 1 に"
     "標準化し、録音の中ほどを示す。"),
    ("Only four arms are drawn.", "只画出四组。", "四群だけを示す。"),
    ("The norm of the first convolution's weights for each electrode, whose signals are "
     "standardized: how strongly the model reads it, not how much its result depends on it.",
     "第一层卷积对每个电极的权重范数（信号已标准化）：表示模型读取该电极的强度，而非结果对它的"
     "依赖程度。",
     "最初の畳み込みの電極ごとの重みのノルム（信号は標準化済み）。モデルがその電極をどれだけ強く"
     "読むかを表し、結果がどれだけ依存するかではない。"),
    ("Seen from above, nose up; the ten largest are named.",
     "俯视图，鼻朝上；标出最大的十个。", "上から見た図で、鼻が上。大きい十個に名前を付けた。"),
    ("Each dot is one seed's difference of an arm from the baseline; the dashed line is no "
     "difference.",
     "每个点是一个种子下某组与基线之差，虚线表示没有差异。",
     "各点は一つのシードでの群とベースラインの差、破線は差がないことを表す。"),
    ("Each dot is one seed's ratio of an arm to the baseline; the dashed line is no difference.",
     "每个点是一个种子下某组与基线之比，虚线表示没有差异。",
     "各点は一つのシードでの群とベースラインの比、破線は差がないことを表す。"),
    ("The line above the dots is the interval of the verdict, with the effect marked; an arrow "
     "means that the interval goes on beyond the axis.",
     "点上方的线是结论的区间，其上标出效应；箭头表示区间延伸到图外。",
     "点の上の線は判定の区間で、効果に印がある。矢印は区間が図の外に続くことを表す。"),
    ("A true effect inside the grey bar would be missed in more than 2 of 10 such comparisons.",
     "灰条之内的真实效应，在 10 次此类比较中会有 2 次以上被漏掉。",
     "灰色の帯の内側にある真の効果は、この種の比較 10 回のうち 2 回より多く見逃される。"),
    ("The bar is the mean over seeds, the line its 95 % interval.",
     "条形是各种子的均值，线是其 95 % 区间。", "棒はシードの平均、線はその 95 % 区間。"),
    ("Arms share their seeds, so the paired differences above are more precise than these "
     "intervals.",
     "各组使用相同的种子，因此上面的配对差值比这些区间更精确。",
     "各群は同じシードを使うため、上の対応のある差のほうがこれらの区間より精密である。"),
    ("Total time of a whole run: the bar is the mean over seeds, the line its 95 % interval.",
     "整次运行的总耗时：条形是各种子的均值，线是其 95 % 区间。",
     "実行全体の時間：棒はシードの平均、線はその 95 % 区間。"),
    ("The runs were not timed in turns, so a difference may come from the machine.",
     "各次运行并非轮流计时，因此差异可能来自机器。",
     "実行は交互に計時されていないため、差は機械によるものかもしれない。"),
    ("The steps, which were timed in turns, are the fair comparison.",
     "轮流计时的单步才是公平的比较。", "交互に計時したステップのほうが公平な比較である。"),
    ("The line is the mean over the finished runs.", "线是已完成运行的均值。",
     "線は完了した実行の平均。"),
    ("The band is one standard deviation around it.", "带是其上下一个标准差。",
     "帯はその前後一標準偏差。"),
    ("Means and deviations are geometric.", "所示为几何均值和几何标准差。",
     "幾何平均と幾何標準偏差を示す。"),
    ("The line is dashed where some runs have no value.", "在部分运行没有数值处，线为虚线。",
     "一部の実行に値がない箇所は破線で示す。"),
    ("Each point is the mean of successive steps.", "每个点是相继若干步的均值。",
     "各点は連続するステップの平均。"),
    ("Bands and intervals are cut off at the smallest and largest possible value.",
     "带和区间在取值范围的两端截断。", "帯と区間は値の範囲の端で切ってある。"),
    ("The first steps, which are slower, are left out.", "未计入较慢的最初几步。",
     "遅い最初の数ステップは除いた。"),
    ("Seconds are the mean over the runs, and include evaluations.",
     "秒数是各次运行的均值，包含评估时间。", "秒数は実行の平均で、評価の時間を含む。"),
    ("Runs were trained in parallel on one machine, which makes them slower.",
     "这些运行在一台机器上并行训练，因而较慢。", "実行は一台の機械で並行して行われたため遅い。"),
    ("FLOPs: those of a timed step's matrix products, times the number of steps.",
     "浮点运算量是计时步的矩阵乘法运算量乘以步数。",
     "演算量は計時したステップの行列積の演算量にステップ数を掛けたもの。"),
    ("Ratio of the time of a training step, with its interval; steps of all arms were timed in "
     "turns on the same batches.",
     "单步训练耗时之比及其区间；各组的步在相同的批次上轮流计时。",
     "学習ステップの時間の比とその区間。全群のステップを同じバッチで交互に計時した。"),
    ("The dashed line is equal time.", "虚线表示耗时相等。", "破線は時間が等しいことを表す。"),
    ("The grey band is the A/A control: the interval of a copy of the baseline against the "
     "baseline.",
     "灰带是 A/A 对照：基线的一个副本与基线相比的区间。",
     "灰色の帯は A/A 対照、すなわちベースラインの複製とベースラインの比の区間。"),
    ("An effect inside it shows nothing.", "落在其内的效应不能说明什么。",
     "その中にある効果は何も示さない。"),
    ("The red mark is the largest speed-up that the FLOPs saved by the treatment explain; a ratio "
     "below it has another cause.",
     "红色标记是该处理节省的浮点运算量所能解释的最大加速；更小的比值另有原因。",
     "赤い印は、処理が省く演算量で説明できる最大の高速化で、これより小さい比には別の原因がある。"),
    ("These times are unproven: the timing failed a check and cannot be trusted.",
     "这些耗时未经证实：计时未通过检查，不可信。",
     "これらの時間は実証されていない。計時が検査に通らず、信頼できない。"),
    ("Ratio of the total time of whole runs, with its interval; runs of all arms alternated.",
     "整次运行总耗时之比及其区间；各组的运行交替进行。",
     "実行全体の時間の比とその区間。各群の実行は交互に行った。"),
    ("Mean over seeds of the best score on the split that selects the checkpoint, with its 95 % "
     "interval; all arms have the same scale.",
     "在选择检查点的数据上最佳得分的各种子均值及其 95 % 区间；各组使用同一尺度。",
     "チェックポイントを選ぶデータでの最良の得点のシード平均とその 95 % 区間。全群の尺度は同じ。"),
    ("A filled symbol is a value that was chosen, and the number above it says for how many seeds; "
     "a seed gets the value that is best over all other seeds.",
     "实心符号是选中的值，上方为选用该值的种子数；每个种子所用的值，是在其余所有种子上得分最佳的值。",
     "塗りつぶした記号は選ばれた値で、上の数はその値を使うシードの数。各シードには、残りのすべての"
     "シードで得点が最良の値を使う。"),
    ("A red × is a value with which a run did not finish.", "红色 × 表示用该值的一次运行未完成。",
     "赤い × は、その値で実行が完了しなかったことを表す。"),
    ("Ratios of an arm to the baseline with their 95 % intervals, paired by seed; the dashed line "
     "is no difference.",
     "各组与基线之比及其 95 % 区间，按种子配对；虚线表示没有差异。",
     "群とベースラインの比とその 95 % 区間（シードで対応）。破線は差がないことを表す。"),
    ("The front is the first two layers, the output the head.", "前端指前两层，输出指头部。",
     "前部は最初の二層、出力はヘッドを指す。"),
    ("Norm of the gradient of each part or layer by step, in the last stage of each arm's first "
     "run; all arms have the same scale.",
     "各组第一次运行的最后阶段中，各部分或各层梯度的范数随步数的变化；各组使用同一尺度。",
     "各群の最初の実行の最終段階における、各部分または各層の勾配ノルムのステップごとの値。"
     "全群の尺度は同じ。"),
    ("In grey cells, {reason}.", "灰色格中：{reason}。", "灰色のます：{reason}。"),
    ("{sign} is {reason}", "{sign} 表示{reason}", "{sign} は{reason}"),
    ("frozen", "已冻结", "凍結"),
    ("no gradient arrived", "没有梯度到达", "勾配が届かないこと"),
    ("NaN or infinity", "NaN 或无穷大", "NaN または無限大"),
    ("Only the first arms of the plan are drawn.", "只画出计划中最前面的几组。",
     "計画の最初の数群だけを描いた。"),
    ("Numbers of parameters that train (dark) and that stay as they are (light).",
     "可训练（深色）与保持不变（浅色）的参数个数。",
     "学習するパラメータ（濃色）と変わらないパラメータ（淡色）の数。"),
    ("Memory of each arm's timed model.", "各组计时模型的内存用量。",
     "各群の計時したモデルのメモリ。"),
    ("The peak is that of its first steps, before timing.", "峰值取自计时之前的最初几步。",
     "ピークは計時の前の最初の数ステップでの値。"),
    ("The symbol is the mean over seeds, the line its 95 % interval.",
     "符号是各种子的均值，线是其 95 % 区间。", "記号はシードの平均、線はその 95 % 区間。"),
    ("Arms with the same share are drawn side by side.", "占比相同的组并排画出。",
     "割合が同じ群は並べて描いた。"),
)  # fmt: skip
PHRASES = {english: dict(zip(_FOREIGN, others, strict=True)) for english, *others in _TEXTS} | {
    text: {language: words[word].meaning for language, words in TRANSLATIONS.items()}
    for word, text in MEANINGS.items()
}
_NAME = re.compile(r"\{(\w+)\}")
_SIGN = r"\S"


def translated(text: str, language: str) -> str:
    """Return a text in a language; what has no translation stays English."""
    if language not in _FOREIGN or not text:
        return text
    whole = _find(text, language)
    if whole is not None:
        return whole
    sentences = re.split(r"(?<=\.) (?=[A-Z])", text)
    if len(sentences) > 1:
        joined = " ".join(translated(sentence, language) for sentence in sentences)
        return re.sub("(?<=。) ", "", joined)
    clauses = [_find(clause, language) for clause in text.split("; ")]
    return "；".join(clause for clause in clauses if clause) if all(clauses) else text


def reason_in(sentence: str, language: str) -> str:
    """Return why a verdict is unproven, from its English sentence."""
    match = _REASON.search(sentence)
    reason = "" if match is None else translated(match[1], language)
    return _UNKNOWN[language] if match is None or reason == match[1] else reason


def _find(text: str, language: str) -> str | None:
    """Return the translation of a whole text, or None."""
    if text in PHRASES:
        return PHRASES[text][language]
    for pattern, english in _patterns():
        if (match := pattern.fullmatch(text)) is not None:
            values = match.groupdict()
            if "reason" in values:
                reason = translated(values["reason"], language)
                if reason == values["reason"]:
                    continue
                values["reason"] = reason
            return PHRASES[english][language].format(**values)
    return None


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns of texts with names in them, the longest texts first."""
    patterns = []
    for english in sorted(PHRASES, key=len, reverse=True):
        if _NAME.search(english):
            parts = _NAME.split(english)
            pattern = "".join(
                f"(?P<{part}>{_SIGN if part == 'sign' else '.+?'})"
                if number % 2
                else re.escape(part)
                for number, part in enumerate(parts)
            )
            patterns.append((re.compile(pattern, re.DOTALL), english))
    return patterns
